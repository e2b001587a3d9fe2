"""What both kinds of worker share: step plans, the step loop, runner, sampler, session."""
