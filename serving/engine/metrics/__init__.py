"""Counters, gauges, histograms, traces and log lines of an engine."""
