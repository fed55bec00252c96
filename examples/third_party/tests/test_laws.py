"""Every law of every operator, in every layout."""

from third_party import RULES

from op_registry.testing import instantiate

test_laws = instantiate(RULES)
