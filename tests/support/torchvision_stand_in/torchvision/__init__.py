"""Stands in for torchvision where it is not installed, so that vLLM's image models can be imported.

They import transformers' image processors, and these import torchvision, although the processors
for Pillow are used. It has no metadata, so transformers still finds no torchvision.
"""
