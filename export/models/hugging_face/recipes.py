"""How each tensor of ours is made of stored ones, and a model that is filled by such recipes."""

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fatdeploy.errors import CheckpointError, in_one_line
from fatdeploy.export.models.hugging_face.weight_files import StoredTensor, StoredTensors
from fatdeploy.export.reference.checkpoint import stored_tensors
from fatdeploy.export.reference.config import ModelConfig
from fatdeploy.export.reference.model import ReferenceModel

Shape = tuple[int, ...]
Fold = Callable[..., Tensor]


@dataclass(frozen=True)
class Part:
    """A stored tensor that a recipe needs; without a ``shape`` it is an equal share of ours."""

    name: str
    shape: Shape | None = None
    optional: bool = False  # zeros if it is missing


@dataclass(frozen=True)
class TensorRecipe:
    """Stored tensors one after another along the first axis, or what ``fold`` makes of them."""

    parts: tuple[Part, ...]
    fold: Fold | None = None


Recipes = Mapping[str, TensorRecipe]


@dataclass(frozen=True)
class LayerNames:
    """Our parts of a layer and the stored ones they consist of, below a stem with ``{index}``."""

    stem: str
    parts: Mapping[str, tuple[str, ...]]

    def recipe(self, index: str, part: str, kind: str) -> TensorRecipe:
        """Return the recipe of the ``weight`` or ``bias`` of a part."""
        stem = self.stem.format(index=index)
        return TensorRecipe(tuple(_layer_part(f"{stem}{name}", kind) for name in self.parts[part]))


def _layer_part(name: str, kind: str) -> Part:
    # A bias of keys adds the same to all scores of a query, which no softmax sees: some files have none.
    return Part(f"{name}.{kind}", optional=kind == "bias" and name.endswith((".k_proj", ".key")))


@dataclass(frozen=True)
class Filling:
    """A model whose tensors are still to be read, and the recipe of each of them."""

    model: ReferenceModel
    recipes: Recipes
    stored: StoredTensors

    @classmethod
    def of(cls, config: ModelConfig, recipe_of: Callable[[str], TensorRecipe], stored: StoredTensors) -> "Filling":
        """Return a model without memory: nothing is initialised that is overwritten anyway."""
        with torch.device("meta"):
            model = ReferenceModel(config).eval()
        return cls(model, {name: recipe_of(name) for name in stored_tensors(model)}, stored)

    def reasons(self, unread: Sequence[str]) -> list[str]:
        """Return all that is missing, mis-shaped or not understood; ``unread`` are patterns of names to pass over."""
        expected = {name: tensor.shape for name, tensor in stored_tensors(self.model).items()}
        names = {part.name for part in self._parts()}
        required = [part.name for part in self._parts() if not part.optional]
        unused = [
            name
            for name in self.stored
            if name not in names and not any(re.fullmatch(pattern, name) for pattern in unread)
        ]
        missing = [name for name in required if name not in self.stored]
        reasons = [f"missing {name}" for name in _in_short(missing, set(required))]
        reasons += [f"not understood {name}" for name in _in_short(unused, set(self.stored))]
        for name, recipe in self.recipes.items():
            for part in recipe.parts:
                if part.name in self.stored:
                    reasons += _wrong_part(part, self.stored[part.name], _share(expected[name], recipe))
        return reasons

    @torch.no_grad()
    def read(self) -> list[str]:
        """Fill the model tensor by tensor; return which have numbers that are none."""
        self.model.to_empty(device="cpu")
        reasons = []
        for name, tensor in stored_tensors(self.model).items():
            self._fill(tensor, self.recipes[name])
            # Smallest and largest need no memory, and NaN is both.
            if not torch.stack(torch.aminmax(tensor)).isfinite().all():
                reasons.append(f"NaN or infinity in {' or '.join(part.name for part in self.recipes[name].parts)}")
        return reasons

    def _parts(self) -> Iterable[Part]:
        return (part for recipe in self.recipes.values() for part in recipe.parts)

    def _fill(self, tensor: Tensor, recipe: TensorRecipe) -> None:
        if recipe.fold is not None:
            tensor.copy_(recipe.fold(*(self.stored[part.name].read().float() for part in recipe.parts)))
            return
        # Row by row into place: a concatenation would hold every matrix twice.
        for rows, part in zip(tensor.chunk(len(recipe.parts)), recipe.parts, strict=True):
            if part.name in self.stored:
                rows.copy_(self.stored[part.name].read())
            else:
                rows.zero_()


def refuse_if(subject: str, reasons: Sequence[str]) -> None:
    """Raise CheckpointError with all reasons, if there are any."""
    if reasons:
        raise CheckpointError(in_one_line(subject, dict.fromkeys(reasons)))


def _share(shape: Sequence[int], recipe: TensorRecipe) -> Shape:
    return (shape[0] // max(1, len(recipe.parts)), *shape[1:])


def _wrong_part(part: Part, stored: StoredTensor, share: Shape) -> list[str]:
    shape = part.shape or share
    if stored.shape != shape:
        return [f"{part.name} has shape {list(stored.shape)}, config.json expects {list(shape)}"]
    return [] if stored.is_weight else [f"{part.name} is {stored.dtype}, expected floating-point numbers"]


def _in_short(names: Iterable[str], everything: set[str]) -> list[str]:
    """Return names, with ``layer.*`` for a layer whose names are all among them."""
    layers: dict[str, set[str]] = defaultdict(set)
    for name in everything:
        layers[_layer(name)].add(name)
    wanted = set(names)
    return list(dict.fromkeys(f"{_layer(name)}*" if layers[_layer(name)] <= wanted else name for name in names))


def _layer(name: str) -> str:
    layer = re.match(r".*?\.\d+\.", name)
    return layer[0] if layer else name
