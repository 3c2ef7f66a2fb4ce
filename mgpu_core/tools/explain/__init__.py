"""The tool behind ``mgpu_core.explain()`` and ``mgpu explain``: a trace as tables, pages, profiles and predictions.

``trace`` and ``step_profile`` hold data; every other file reads them, and none of them reads another's private parts.
"""
