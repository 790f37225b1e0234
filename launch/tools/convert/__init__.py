"""`rl-platform convert`: writes a config of this platform from one of another system.

One table per system (`rlinf.py`, `verl.py`, `nemo_rl.py`, `trl.py`, `sb3.py`) maps its keys. Plain renames are in
`platform/config/names.yaml`. `conversion.py` applies a table, `reading.py` reads the file, `converted_yaml.py` writes
and prints.
"""
