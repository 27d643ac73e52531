{{/* The pod of a worker. */}}
{{- define "hvd-elastic.workerPod" -}}
{{- $worker := .Values.worker }}
{{- $affinity := deepCopy $worker.affinity }}
{{- if or $worker.hostNetwork $worker.onePerNode }}
{{- $labels := dict "matchLabels" (include "hvd-elastic.selector" (list . "worker") | fromYaml) }}
{{- $alone := dict "topologyKey" "kubernetes.io/hostname" "labelSelector" $labels }}
{{- $anti := $affinity.podAntiAffinity | default dict }}
{{- $required := $anti.requiredDuringSchedulingIgnoredDuringExecution | default list }}
{{- $_ := set $anti "requiredDuringSchedulingIgnoredDuringExecution" (append $required $alone) }}
{{- $_ := set $affinity "podAntiAffinity" $anti }}
{{- end }}
{{- $security := deepCopy .Values.securityContext }}
{{- if $worker.ipcLock }}
{{- $capabilities := $security.capabilities | default dict }}
{{- $_ := set $capabilities "add" (append ($capabilities.add | default list) "IPC_LOCK" | uniq) }}
{{- $_ := set $security "capabilities" $capabilities }}
{{- end -}}
metadata:
  labels:
    {{- include "hvd-elastic.podLabels" (list . "worker" $worker.podLabels) | nindent 4 }}
    {{- if not .Values.jobset.enabled }}
    {{- with include "hvd-elastic.queueLabels" . }}
    {{- . | nindent 4 }}
    {{- end }}
    {{- end }}
  {{- with $worker.podAnnotations }}
  annotations:
    {{- toYaml . | nindent 4 }}
  {{- end }}
spec:
  {{- if .Values.jobset.enabled }}
  restartPolicy: OnFailure
  {{- end }}
  {{- with $worker.serviceAccountName }}
  serviceAccountName: {{ . | quote }}
  {{- end }}
  automountServiceAccountToken: false
  {{- if $worker.hostNetwork }}
  hostNetwork: true
  dnsPolicy: ClusterFirstWithHostNet
  {{- end }}
  {{- include "hvd-elastic.podSettings" (list . $worker) | nindent 2 }}
  {{- with $affinity }}
  affinity:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with $worker.topologySpread }}
  topologySpreadConstraints:
    {{- range . }}
    {{- $ours := dict "matchLabels" (include "hvd-elastic.selector" (list $ "worker") | fromYaml) }}
    - {{ toYaml (merge dict . (dict "labelSelector" $ours)) | indent 6 | trim }}
    {{- end }}
  {{- end }}
  containers:
    - name: agent
      {{- include "hvd-elastic.containerSettings" . | nindent 6 }}
      command:
        - elasticrun
      args:
        {{- include "hvd-elastic.agentArguments" . | nindent 8 }}
      env:
        - name: POD_IP
          valueFrom:
            fieldRef:
              fieldPath: status.podIP
        - name: POD_NAME
          valueFrom:
            fieldRef:
              fieldPath: metadata.name
        - name: NODE_NAME
          valueFrom:
            fieldRef:
              fieldPath: spec.nodeName
        - name: ELASTIC_GRACE_SECONDS
          value: {{ $worker.graceSeconds | int | quote }}
        - name: ELASTIC_READY_FILE
          value: /run/hvd-elastic/agent/connected
        {{- with include "hvd-elastic.env" . }}
        {{- . | nindent 8 }}
        {{- end }}
      readinessProbe:
        exec:
          command: [test, -e, /run/hvd-elastic/agent/connected]
        periodSeconds: 5
      {{- with include "hvd-elastic.workerResources" . | fromJson }}
      resources:
        {{- toYaml . | nindent 8 }}
      {{- end }}
      {{- with $security }}
      securityContext:
        {{- toYaml . | nindent 8 }}
      {{- end }}
      volumeMounts:
        - name: agent
          mountPath: /run/hvd-elastic/agent
        - name: shm
          mountPath: /dev/shm
        {{- include "hvd-elastic.mounts" (list . $worker) | nindent 8 }}
  volumes:
    - name: agent
      emptyDir: {}
    - name: shm
      emptyDir:
        medium: Memory
        sizeLimit: {{ $worker.shm | quote }}
    {{- include "hvd-elastic.volumes" (list . $worker) | nindent 4 }}
{{- end }}
