"""The Gluon kernel of decode_sm90.py; kernel.py says how it works."""
