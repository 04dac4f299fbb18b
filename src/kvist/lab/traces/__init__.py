"""Traces of requests in everyone's form, read in the order of arrival, without holding more than it takes."""

from kvist.lab.traces.opening import KINDS, FileTrace, open_trace
from kvist.lab.traces.problems import Problems
from kvist.lab.traces.requests import HashedPrompt, Prompt, Request, TokenPrompt, Trace

__all__ = ["KINDS", "FileTrace", "HashedPrompt", "Problems", "Prompt", "Request", "TokenPrompt", "Trace", "open_trace"]
