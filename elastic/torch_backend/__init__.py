"""The backend ``elastic`` of ``torch.distributed``, registered on import. See docs/pytorch.md."""

from elastic.torch_backend.registration import register

register()
