"""``dr.from_params``: the dictionaries of GRACE and DeepReduce."""
