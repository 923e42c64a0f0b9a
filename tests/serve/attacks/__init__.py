"""What hostile.py plays against a server: attacks, watchers that know right answers, and the
table."""
