"""Options that the tests add to pytest. Imports pytest alone."""
