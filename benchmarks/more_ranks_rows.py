"""The rows of benchmarks/more_ranks.py."""

#: Horovod alone, and all gradients in one message
NONE, DENSE = "none", "one message"
#: names of communicators; all gradients share one bucket
COMMUNICATORS = ("Allgather", "SplitAllgather", "RecursiveDoubling", "GTopK", "CLTK")
