# kt in a container. NOT RUN: written from the steps that scripts/setup.sh and `make install` take on Debian 12, on a
# machine without a container engine. Mend what does not work, and take this line away.
#
#   docker build -t kt .
#   docker run --rm -p 127.0.0.1:30000:30000 -v /srv/models:/models:ro kt run /models/Qwen3-30B-A3B --host 0.0.0.0
#
# The program picks the instruction set at run time, so one image serves every x86-64 (or arm64) machine. On a host with
# NVIDIA's container runtime, `--gpus all` brings the driver library, which is all that `--gpu` needs.
FROM debian:12-slim AS build
COPY scripts/setup.sh /src/scripts/setup.sh
RUN /src/scripts/setup.sh git ca-certificates make && rm -rf /var/lib/apt/lists/*
COPY . /src
WORKDIR /src
RUN make program && cmake --install build --prefix /out --component Unspecified

FROM debian:12-slim
RUN apt-get update && apt-get install -y --no-install-recommends libcurl4 libssl3 libstdc++6 ca-certificates \
    && rm -rf /var/lib/apt/lists/* && useradd --system --create-home --home-dir /var/lib/kt kt
COPY --from=build /out /usr/local
USER kt
ENV KT_HOME=/var/lib/kt HF_HOME=/var/lib/kt/hub
EXPOSE 30000
ENTRYPOINT ["kt"]
CMD ["run", "demo", "--host", "0.0.0.0"]
