"""The Gluon kernel of prefill_sm90.py; kernel.py says how it works."""
