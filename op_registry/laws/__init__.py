"""The laws that operators share, and the words that register operators under them.

A category is a law, with a generic dense run that obeys it and the lowerings to sparse storage that follow from the
dimensions which a rule states. The modules share this: each takes a statement of what an operator is, and makes a
:class:`~op_registry.rule.Rule` of it.

    categories    the laws and their runs
    words         a word for each law: ``exp = elementwise(aten.exp)``
    slice_rules   rules whose bodies are written once, over slices of dense or stored elements
    whole_slices  the law of operators for which a slice counts whole or not at all
    inside        rules that hold inside one Python function
"""
