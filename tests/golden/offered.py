"""The names in the Vision-LSTM files that NX-AI offers: what their hub script renames before it loads one, undone."""

import re


def offered(key: str) -> str:
    """The name in the file of a parameter of the released model."""
    key = re.sub(r"^blocks\.(\d+)\.rowwise_from_top_left\.", lambda at: f"blocks.{int(at[1]) * 2}.", key)
    key = re.sub(r"^blocks\.(\d+)\.rowwise_from_bot_right\.", lambda at: f"blocks.{int(at[1]) * 2 + 1}.", key)
    key = re.sub(r"^norm\.", "post_blocks_norm.", key)
    key = re.sub(r"^legacy_norm\.", "head.0.", re.sub(r"^head\.", "head.1.", key))
    key = key.replace(".layer.conv.", ".layer.conv1d.").replace(".layer.", ".xlstm.")
    key = re.sub(r"^(blocks\.\d+)\.norm\.", r"\1.xlstm_norm.", key)
    return f"xlstm.{key}" if key.startswith("blocks") else key
