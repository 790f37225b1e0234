"""`rl-platform convert`: writes a config of this platform from one of another system.

Each system has a table of keys that need no computation (`rlinf.yaml`, `verl.yaml`, ...), read by `key_tables.py`, and
a module of rules for the others (`rlinf.py`, ...). Plain renames are in `platform/config/explanations/names.yaml`.
`conversion.py` applies a table, `reading.py` reads the file, `converted_yaml.py` writes and prints.
"""
