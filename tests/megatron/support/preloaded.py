"""What a rank needs, imported once in the server that ranks are started from."""

import megatron.bridge  # noqa: F401
import megatron.core.distributed  # noqa: F401
import megatron.core.models.gpt  # noqa: F401
import megatron.core.models.hybrid.hybrid_model  # noqa: F401
import transformers.core_model_loading  # noqa: F401
import transformers.models.deepseek_v3.modeling_deepseek_v3
import transformers.models.llama.modeling_llama
import transformers.models.nemotron_h.modeling_nemotron_h
import transformers.models.qwen2.modeling_qwen2
import transformers.models.qwen3.modeling_qwen3
import transformers.models.qwen3_moe.modeling_qwen3_moe  # noqa: F401
