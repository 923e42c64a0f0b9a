"""The wheel and the sdist, in empty environments, without the checkout."""
