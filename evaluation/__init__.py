"""What an agent can do: evaluation, exported policies, videos."""
