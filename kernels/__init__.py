"""GPU kernels, each beside its plain-torch reference and chosen by the device of its operands.

Import-light on purpose: this package shadows the Hugging Face distribution of the same name, which
transformers looks for. Import the modules by name: ``from kernels.act_quant import act_quant``.
"""
