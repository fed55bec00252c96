"""Linear algebra: decompositions, functions of a matrix, and systems of linear equations.

Law: all or nothing for each matrix. A matrix without a hole gives what torch gives for it alone; one with a hole gives
nothing, raises nothing, and changes none of its neighbours. The results for a matrix share its validity.

    matrices  operators of one matrix: inverses, decompositions, determinants, functions
    solves    systems of equations: all or nothing for each column of the solution
"""
