"""The KV plane: plans, slabs, links and transports that move KV between workers."""
