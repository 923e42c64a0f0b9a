"""The parts of hostile.py: attacks, watchers that know the right answers, and the table."""
