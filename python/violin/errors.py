"""The one exception type of the package."""


class Error(ValueError):
    """A message for a person, naming the thing and the remedy."""
