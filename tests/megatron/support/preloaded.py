"""What a rank needs, imported once in the server that ranks are started from."""

import megatron.bridge
import megatron.core.distributed
import megatron.core.models.gpt
import megatron.core.models.hybrid.hybrid_model  # noqa: F401
import transformers.core_model_loading
import transformers.models.deepseek_v3.modeling_deepseek_v3
import transformers.models.llama.modeling_llama
import transformers.models.nemotron_h.modeling_nemotron_h
import transformers.models.qwen2.modeling_qwen2
import transformers.models.qwen3.modeling_qwen3
import transformers.models.qwen3_moe.modeling_qwen3_moe  # noqa: F401
