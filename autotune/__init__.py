"""What Penstock chooses by measuring: one file for each choice.

    cores        actors and threads of learners, from the ledgers of a running run
    envs         environments of an actor (`actors.envs=auto`), before the roles start
    connectors   connectors of a learner (`transport.connectors=auto`), before the roles start

Each file has the rule, from measurements to a choice with its reason as a sentence. What is timed
before the roles start is timed by `penstock.launch.measuring`, and cached by
`penstock.core.user_cache`.
"""
