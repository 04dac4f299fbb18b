"""Reports on a trace: one HTML page with everything in it, and plots as PNG or SVG."""

from kvist.lab.report.icicle import IcicleNode, PrefixIcicle
from kvist.lab.report.page import html_report
from kvist.lab.report.plots import PICTURES, save_plot
from kvist.lab.report.reuse import ReuseClass, reuse_classes

__all__ = ["PICTURES", "IcicleNode", "PrefixIcicle", "ReuseClass", "html_report", "reuse_classes", "save_plot"]
