"""What the tests of the store's server have in common."""

KEY = "the store's own key"
