"""python -m weightvc_kernels: compile everything now, as when an image is built, not when a patch is waited for."""

from weightvc_kernels import context

context.prepare()
