"""Movement: operators that move, copy or drop elements and compute nothing from them.

Law: an element moves together with its validity. Elements that the operator itself writes, such as padding, are valid.

    views           views of a tensor's memory, and their copying variants
    rules           flip, roll, repeat, tril and triu, padding, diag_embed, im2col, one_hot
    joins           cat, stack, where; where on sparse storage
    sparse          views, flips, rolls, repeats and joins on sparse storage, also with dense dimensions in front
    sparse_windows  padding and unfold, on sparse storage
"""
