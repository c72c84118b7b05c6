"""Facts for a report: what a repository's history looks like. The command line draws them.

facts      versions as the log tells them, what storing and reading them takes; metrics of jobs and hosts
layers     what the layers changed: over the whole run by block indexes, in the newest versions by their bits
metrics    the files that jobs and hosts write
"""

from weightvc.report.facts import Facts, gather

__all__ = ["Facts", "gather"]
