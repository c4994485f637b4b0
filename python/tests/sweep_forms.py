"""Forms in which sweep_transformers.py compares models: what a model makes of its inputs with and without
padding, of packed sequences, from caches and in a training step."""

import copy
import inspect

import sweep_models as models
import torch

CACHES = ("past_key_values", "cache", "encoder_past_key_values")
NEW = 8


class Without(Exception):
    """A model has no such form."""


def build(kind, by, device, dtype, level, std, seed):
    torch.manual_seed(seed)
    config = models.config_of(kind, level)
    cls = models.class_of(kind)
    if level != models.LEVELS[0]:
        with torch.device("meta"):
            count = sum(x.numel() for x in cls._from_config(copy.deepcopy(config)).parameters())
        if count > 4e7:
            raise MemoryError(f"{count} parameters")
    model = cls._from_config(config, attn_implementation=by, dtype=torch.float32)
    if std is not None:
        models.initialise(model, std, seed)
    for module in model.modules():
        for name, value in list(vars(module).items()):
            is_rate = "drop" in name or isinstance(module, torch.nn.Dropout) and name == "p"
            if is_rate and isinstance(value, float):
                setattr(module, name, 0.0)
    generation = getattr(model, "generation_config", None)
    if generation is not None:
        for name in "eos_token_id suppress_tokens begin_suppress_tokens forced_bos_token_id".split():
            setattr(generation, name, None)
        generation.forced_eos_token_id = None
        generation.pad_token_id = 0
        generation.bos_token_id = generation.decoder_start_token_id = 1
    return model.to(device, dtype).eval()


def tensors(result, name="", skip=CACHES):
    """The floating-point tensors of a model's output by name."""
    if isinstance(result, torch.Tensor):
        return {name: result} if result.is_floating_point() else {}
    if isinstance(result, dict):
        items = result.items()
    elif isinstance(result, (list, tuple)):
        items = enumerate(result)
    else:
        return {}
    made = {}
    for key, value in items:
        if key not in skip:
            made.update(tensors(value, f"{name}.{key}".strip("."), skip))
    return made


def apart(one, other):
    """The largest difference of two lists of tensors, relative to the largest value of each."""
    if len(one) != len(other):
        return float("inf"), "other outputs"
    worst, where = 0.0, ""
    for name, a in one.items():
        b = other.get(name)
        if b is None or a.shape != b.shape:
            return float("inf"), f"{name} of another shape"
        a, b = a.double(), b.double()
        same = (a == b) | (a.isnan() & b.isnan())
        a, b = a.masked_fill(same, 0), b.masked_fill(same, 0)
        if not same.all():
            largest = one[name].double().nan_to_num(0, 0, 0).abs().max()
            off = ((a - b).abs().max() / largest.clamp(min=1e-6)).item()
            off = off if off == off else float("inf")
            if off > worst:
                worst, where = off, name
    return worst, where


def weighed(x):
    """A number that depends on each of a tensor's."""
    weights = models.noise(*x.shape, seed=8).to(x.device)
    return (x.float() * weights).nan_to_num(0, 0, 0).sum() / x.numel() ** 0.5


class Given:
    """Inputs, and what a model makes of them in each form."""

    def __init__(self, inputs, device, dtype):
        self.device = device
        self.inputs = models.placed(inputs, device, dtype)

    def call(self, model, **inputs):
        torch.manual_seed(5)
        return model(**inputs)

    def made(self, form, model):
        return getattr(self, form)(model)

    def wanted(self, form, model):
        return self.separate(model) if form == "packed" else self.made(form, model)

    def full(self, model):
        with torch.no_grad():
            return tensors(self.call(model, **self.inputs))

    def _mask(self, model, side):
        """Inputs with padding, and which rows stay by their number."""
        names = inspect.signature(model.forward).parameters
        inputs, kept = dict(self.inputs), {}
        pairs = [("input_ids", "attention_mask"), ("decoder_input_ids", "decoder_attention_mask")]
        if "input_ids" not in inputs:
            pairs += [("input_values", "attention_mask"), ("input_features", "attention_mask")]
            pairs += [("input_features", "input_features_mask"), ("inputs_embeds", "attention_mask")]
        for source, name in pairs:
            value = inputs.get(source)
            if value is None or name not in names or name in inputs and name != "attention_mask":
                continue
            is_sound = source in ("input_values", "input_features")
            if is_sound and (side == "left" or value.dim() > 3):
                continue
            rows = value.shape[-1] if source == "input_values" else value.shape[1]
            if source == "input_features" and rows == models.bands(model.config):
                rows = value.shape[2]
            mask = torch.ones(2, rows, dtype=torch.long, device=self.device)
            if side == "left":
                mask[0, : models.LEFT if rows > models.TARGET else 3] = 0
            else:
                mask[1, rows - (rows // 3 if is_sound or rows > models.TARGET else 3) :] = 0
            inputs[name] = mask
            if source.endswith("ids"):
                inputs[source] = value.masked_fill(mask == 0, 0)
            kept[rows] = mask.bool()
        if not kept:
            raise Without
        return inputs, kept

    def _kept(self, made, kept, side):
        """Rows of outputs that are not padding; of outputs of another form the batch's entry without any."""
        unpadded, rows = 1 if side == "left" else 0, {}
        for name, value in made.items():
            if value.dim() < 2 or value.shape[0] != 2 or "logits_per" in name:
                continue
            mask = kept.get(value.shape[1])
            rows[name] = value[unpadded] if mask is None else value[mask]
        return rows

    def padded(self, model, side, content=0):
        inputs, kept = self._mask(model, side)
        if content:
            for prefix in ("", "decoder_"):
                name, mask = f"{prefix}input_ids", f"{prefix}attention_mask"
                if name in inputs and mask in inputs:
                    inputs[name] = inputs[name].masked_fill(inputs[mask] == 0, content)
        with torch.no_grad():
            return self._kept(tensors(self.call(model, **inputs)), kept, side)

    def left(self, model):
        return self.padded(model, "left")

    def right(self, model):
        return self.padded(model, "right")

    def _packable(self, model):
        names = inspect.signature(model.forward).parameters
        if "input_ids" not in self.inputs or "position_ids" not in names or "decoder_input_ids" in names:
            raise Without
        takes = "use_cache" in names or any(x.kind == x.VAR_KEYWORD for x in names.values())
        return models.tokens((1, models.TEXT), 7).to(self.device), {"use_cache": False} if takes else {}

    def packed(self, model):
        ids, more = self._packable(model)
        first = models.TARGET
        places = torch.cat([torch.arange(first), torch.arange(models.TEXT - first)])[None].to(self.device)
        with torch.no_grad():
            made = tensors(self.call(model, input_ids=ids, position_ids=places, **more))
        return {k: v[0] for k, v in made.items() if v.shape[:2] == ids.shape}

    def separate(self, model):
        ids, more = self._packable(model)
        parts = []
        for part in ids.split([models.TARGET, models.TEXT - models.TARGET], 1):
            places = torch.arange(part.shape[1], device=self.device)[None]
            with torch.no_grad():
                made = tensors(self.call(model, input_ids=part, position_ids=places, **more))
            parts.append({k: v[0] for k, v in made.items() if v.shape[:2] == part.shape})
        return {k: torch.cat([x[k] for x in parts]) for k in parts[0] if all(k in x for x in parts)}

    def cached(self, model):
        if not getattr(model, "can_generate", lambda: False)():
            return self.steps(model)
        try:
            inputs = self._mask(model, "left")[0]
        except Without:
            inputs = dict(self.inputs)
        for name in ("decoder_input_ids", "decoder_attention_mask"):
            inputs.pop(name, None)
        torch.manual_seed(5)
        more = dict(max_new_tokens=NEW, do_sample=False, num_beams=1)
        more |= dict(output_logits=True, return_dict_in_generate=True)
        with torch.no_grad():
            out = model.generate(**inputs, **more)
        made = dict(zip(map(str, range(NEW)), out.logits))
        made["tokens"] = out.sequences[:, -NEW:].double()
        return made

    def steps(self, model):
        """Two steps after a prefill, by a model that has a cache and generates nothing."""
        inputs, names = self._mask(model, "left")[0], inspect.signature(model.forward).parameters
        if "input_ids" not in inputs or not set(CACHES) & set(names) or "attention_mask" not in inputs:
            raise Without
        mask, made = inputs["attention_mask"], {}
        with torch.no_grad():
            out = self.call(model, **inputs, use_cache=True)
            for step in range(2):
                known = [k for k in CACHES if k in names and isinstance(out, dict)]
                cache = {k: out[k] for k in known if out.get(k) is not None}
                if not cache:
                    raise Without
                mask = torch.cat([mask, mask[:, -1:]], 1)
                more = {k: v for k, v in inputs.items() if k.startswith("encoder_")}
                if "position_ids" in names:
                    more["position_ids"] = mask.sum(1, keepdim=True) - 1
                ids = models.tokens((2, 1), step).to(self.device)
                out = self.call(model, input_ids=ids, attention_mask=mask, use_cache=True, **cache, **more)
                made.update({f"{step}.{k}": v for k, v in tensors(out).items()})
        return made

    def train(self, model):
        model.train()
        try:
            names = inspect.signature(model.forward).parameters
            labels = self.inputs.get("decoder_input_ids", self.inputs.get("input_ids"))
            made = None
            if "labels" in names and labels is not None and hasattr(model, "generate"):
                try:
                    made = {"loss": self.call(model, **self.inputs, labels=labels)["loss"]}
                except Exception as error:
                    if type(error).__module__.startswith("fa_attn"):
                        raise
            if made is None or made["loss"] is None:
                made = tensors(self.call(model, **self.inputs))
            loss = sum(weighed(x) for x in made.values() if x.requires_grad)
            if not isinstance(loss, torch.Tensor):
                raise Without
            model.zero_grad()
            loss.backward()
            grads = {k: p.grad for k, p in model.named_parameters() if p.grad is not None}
            largest = max((g.abs().max() for g in grads.values() if g.numel()), default=loss.detach())
            # A gradient far smaller than others is rounding.
            grads = {k: torch.cat([g.flatten(), largest.reshape(1) * 1e-2]) for k, g in grads.items()}
            return {"loss": loss.detach(), **{k: g.detach().clone() for k, g in grads.items()}}
        finally:
            model.zero_grad()
            model.eval()


def kinds_of(inputs):
    """What a model was given, in words."""
    words = []
    for names, word in (
        (("input_ids", "decoder_input_ids"), "text"),
        (("pixel_values", "pixel_values_videos", "grid_thw"), "image"),
        (("input_features", "input_values"), "sound"),
    ):
        if any(name in inputs for name in names):
            words.append(word)
    return "+".join(words) or "other"


def reason_of(error):
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}"[:200]


def generated_apart(one, other, limit):
    """Steps of greedy generation up to the first whose tokens differ, where two logits may be as large."""
    for step in range(NEW):
        a, b = ({"": x[str(step)]} for x in (one, other))
        off, _ = apart(a, b)
        if off > limit:
            return off, f"logits of step {step}"
        same = one["tokens"][:, step] == other["tokens"][:, step]
        if not same.all():
            return 0.0, ""
    return 0.0, ""


def difference(one, other, limit):
    """The largest relative difference of two outputs, and where it is."""
    if "tokens" in one and "tokens" in other and len(one) == len(other) == NEW + 1:
        return generated_apart(one, other, limit)
    return apart(one, other)


