"""Answers that go on on another replica: what is told of them, and what is made of it there."""
