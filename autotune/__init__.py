"""What Penstock chooses by measuring: one file for each choice.

    cores        actors and threads of learners, from the ledgers of a running run
    envs         environments of an actor (`actors.envs=auto`), before the roles start
    connectors   connectors of a learner (`transport.connectors=auto`), before the roles start
    forms        number format, order of images and pass size of networks, as each role starts
    codec        gradient codec of learners (`learner.reduce.codec=auto`), when they first meet

Each file has the rule, from measurements to a choice with its reason as a sentence. What is timed
before the roles start is timed by `penstock.launch.measuring`, codecs by
`penstock.learner.codecs.auto`; `forms` times networks itself. Times are kept by
`penstock.core.user_cache`, those of codecs excepted, which belong to one network of hosts.
"""
