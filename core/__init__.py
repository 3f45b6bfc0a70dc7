"""Types that every room shares: slot specs, parameter layouts, the context of a role."""
