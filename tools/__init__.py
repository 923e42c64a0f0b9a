"""Programs for people who work on this project: measurements, faults, attacks and surveys.

They are run by hand, as `python -m tools.NAME`. Tests play bounded parts of some of them.
"""
