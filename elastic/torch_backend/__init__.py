"""The backend ``elastic`` of ``torch.distributed``. Importing it registers it; docs/pytorch.md."""

from elastic.torch_backend.registration import register

register()
