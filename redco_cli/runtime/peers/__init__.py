"""The other processes of a run, beside JAX: who they are, values gathered from them, and which of them is gone.

In: the environment variables of a scheduler (`cluster`) and the connection that `runtime.rendezvous` has opened. Out:
`multihost.process_index`, `is_main_process` and `process_allgather`, for whoever does something once or must agree. All
of them work for a process alone, and none needs JAX.

Start with `multihost`, what the rest of redco uses. `connection` is behind it: gathering, agreeing on a stop, failures
of others. `wire` sends the `messages`: JSON over TCP, signed, with a heartbeat; before the first of them a `handshake`
proves that both ends know the `secret`. `agreement` compares the batches of all, `census` counts their rows.
"""
