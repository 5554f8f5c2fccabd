"""A frozen target larger than a card: the ranks of a node share out the weights of every decoder layer (FSDP2).

A layer is gathered before its forward and dropped after it, while the next one's weights arrive. Embeddings and the
final norm stay whole, because the loss reads them. Every rank runs its own rows, so the hooks that capture features are
those of an unsharded target. docs/SCALING.md compares the engines.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from specvocab_model.config import ConfigError, TargetConfig
from specvocab_model.target import Target


def load_sharded(config: TargetConfig, accelerator: Accelerator, feature_layers: Sequence[int] | None) -> Target:
    """Rank 0 reads the target into its CPU memory and deals it out, one tensor after the other. Called by all ranks.

    Raises:
        ConfigError: as ``Target.load``, on all ranks.
    """
    whole: Target | None = None
    message: list[Any] = [None, None]
    if accelerator.is_main_process:
        try:
            whole = Target.load(config, device="cpu", feature_layers=feature_layers)
            message[0] = (whole.spec, whole.model.config, whole.lm_head_weight.dtype, whole.tokenizer)
        except ConfigError as error:
            message[1] = str(error)
    content, problem = broadcast_object_list(message)
    if problem is not None:
        raise ConfigError(problem)
    spec, model_config, dtype, tokenizer = content
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(model_config, dtype=dtype,
                                                 attn_implementation=config.attn_implementation)
    shard(model, accelerator.device)
    deal_out(None if whole is None else whole.model, model, accelerator.device)
    return Target(spec, model, tokenizer, feature_layers)


def shard(model: PreTrainedModel, device: torch.device) -> None:
    """Partition the decoder layers of a model on the meta device, and give all of it memory, still without content."""
    per_node = int(os.environ.get("LOCAL_WORLD_SIZE", dist.get_world_size()))
    shape = (dist.get_world_size() // per_node, per_node)
    nodes = init_device_mesh(device.type, shape, mesh_dim_names=("node", "rank"))
    decoder = model.get_decoder()
    in_layers = {parameter for layer in decoder.layers for parameter in layer.parameters()}
    for layer in decoder.layers:
        fully_shard(layer, mesh=nodes["rank"], reshard_after_forward=True)
    # A common root, without parameters of its own, lets a layer's weights travel while the layer before computes.
    fully_shard(decoder, mesh=nodes["rank"], ignored_params=set(decoder.parameters()) - in_layers)
    model.to_empty(device=device)
    model.tie_weights()


@torch.no_grad()
def deal_out(whole: PreTrainedModel | None, model: PreTrainedModel, device: torch.device) -> None:
    """Copy parameters and buffers of ``whole``, which rank 0 has, into the sharded ``model`` of every rank."""
    source = {} if whole is None else {**dict(whole.named_parameters()), **dict(whole.named_buffers())}
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        content = source[name].to(device) if source else torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
        dist.broadcast(content, 0)
        own(tensor).copy_(own(distribute_tensor(content, tensor.device_mesh, tensor.placements, src_data_rank=None))
                          if isinstance(tensor, DTensor) else content)


def own(tensor: Tensor) -> Tensor:
    """This rank's part of a sharded tensor; another one itself."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
