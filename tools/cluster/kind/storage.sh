#!/usr/bin/env bash
# Volumes of the class that the end-to-end tests ask for, in the folder that all nodes of kind/cluster.yaml share.
# `storage.sh folders` before the cluster is made, `storage.sh volumes` after it.
set -euo pipefail
case "$1" in
  folders)
    # fsGroup does not apply to hostPath: the pods' uid must be able to write as it is.
    for i in $(seq 1 30); do mkdir -p "/tmp/disttrain-shared/$i" && chmod 0777 "/tmp/disttrain-shared/$i"; done
    ;;
  volumes)
    {
      printf 'apiVersion: storage.k8s.io/v1\nkind: StorageClass\nmetadata: {name: disttrain-shared}\n'
      printf 'provisioner: kubernetes.io/no-provisioner\n'
      for i in $(seq 1 30); do
        printf -- '---\napiVersion: v1\nkind: PersistentVolume\nmetadata: {name: disttrain-shared-%s}\n' "$i"
        printf 'spec: {storageClassName: disttrain-shared, accessModes: [ReadWriteMany], capacity: {storage: 1Gi},'
        printf ' persistentVolumeReclaimPolicy: Retain, hostPath: {path: /disttrain-shared/%s}}\n' "$i"
      done
    } | kubectl apply -f -
    ;;
  *) echo "usage: storage.sh folders|volumes" >&2; exit 2 ;;
esac
