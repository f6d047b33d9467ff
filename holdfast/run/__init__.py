"""One run that survives failures: state, policies, session, worker, controller."""
