"""Names of files in the output folder of a run that several modules read or write."""

CONFIG = "config.yaml"  # with all defaults; marks the folder of a run
METRICS = "metrics.jsonl"  # a line per step
FINISHED = "finished"  # empty: the last step and the exports are done
