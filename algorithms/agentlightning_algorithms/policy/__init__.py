"""Policy back ends: trainable models that can be served."""
