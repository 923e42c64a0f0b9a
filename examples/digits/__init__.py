"""Pictures of digits as tokens: what guidance does to an image-token model (docs/digits.md)."""
