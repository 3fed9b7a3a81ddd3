"""Benchmarks: what `lolcats bench` and the scripts in benchmarks/ measure with."""
