"""Encoders: this engine beside others, by speed and by what their vectors find."""
