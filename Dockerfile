# An image with Penstock, its pinned packages and Ray:  docker build -t penstock .
# Any Debian with Python 3.11 or newer and its venv module is a base: --build-arg BASE=...
ARG BASE=python:3.11-slim-bookworm
FROM ${BASE}
ARG EXTRAS=atari,box2d,minatar,mujoco,ray

RUN apt-get update && apt-get install -y --no-install-recommends make && rm -rf /var/lib/apt/lists/*
RUN useradd --uid 1000 --create-home penstock

WORKDIR /opt/penstock
COPY . .
RUN make venv EXTRAS=${EXTRAS}
ENV PATH=/opt/penstock/.venv/bin:$PATH

USER 1000
WORKDIR /home/penstock
CMD ["penstock", "--help"]
