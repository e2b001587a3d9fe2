"""The whole hand-off on a virtual clock, in one thread: real roles, step loops, pools and KV plane.

``schedule.run_schedule(seed)`` plays one random schedule; ``soak`` plays many.
"""
