{{- define "batchweave.labels" -}}
app.kubernetes.io/name: batchweave
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .component }}
{{- end }}

{{- define "batchweave.image" -}}
{{ .name }}:{{ .root.Values.image.tag | default .root.Chart.AppVersion }}
{{- end }}

{{/* What the restricted Pod Security Standard asks for. */}}
{{- define "batchweave.podSecurity" -}}
runAsNonRoot: true
runAsUser: 10001
runAsGroup: 10001
fsGroup: 10001
seccompProfile: {type: RuntimeDefault}
{{- end }}

{{- define "batchweave.containerSecurity" -}}
allowPrivilegeEscalation: false
capabilities: {drop: [ALL]}
{{- end }}

{{- define "batchweave.settings" -}}
{{- range $name, $value := . }}
- {name: {{ $name }}, value: {{ $value | toString | quote }}}
{{- end }}
{{- end }}

{{/* The pod of a model's worker; with more than one node also of its followers. */}}
{{- define "batchweave.worker" -}}
{{- $root := .root }}
{{- $model := .model }}
metadata:
  labels:
    {{- include "batchweave.labels" (dict "root" $root "component" (printf "worker-%s" $model.name)) | nindent 4 }}
spec:
  automountServiceAccountToken: false
  terminationGracePeriodSeconds: 60
  securityContext:
    {{- include "batchweave.podSecurity" $root | nindent 4 }}
  {{- with $root.Values.image.pullSecrets }}
  imagePullSecrets: {{ toJson . }}
  {{- end }}
  {{- with $model.nodeSelector }}
  nodeSelector: {{ toJson . }}
  {{- end }}
  {{- with $model.tolerations }}
  tolerations: {{ toJson . }}
  {{- end }}
  containers:
    - name: worker
      image: {{ include "batchweave.image" (dict "root" $root "name" $root.Values.image.worker) }}
      imagePullPolicy: {{ $root.Values.image.pullPolicy }}
      args: [worker]
      envFrom:
        - secretRef: {name: {{ $root.Values.existingSecret }}}
      env:
        - {name: BATCHWEAVE_MODEL, value: {{ $model.model | quote }}}
        {{- with $model.modelName }}
        - {name: BATCHWEAVE_MODEL_NAME, value: {{ . | quote }}}
        {{- end }}
        {{- with $model.adapters }}
        - {name: BATCHWEAVE_ADAPTERS, value: {{ toJson . | quote }}}
        {{- end }}
        {{- with $model.gpu }}
        - {name: BATCHWEAVE_GPU, value: {{ . | quote }}}
        {{- end }}
        - {name: BATCHWEAVE_ENGINE_ARGS, value: {{ $model.engineArgs | default dict | toJson | quote }}}
        - name: BATCHWEAVE_WORKER_NAME
          valueFrom: {fieldRef: {fieldPath: metadata.name}}
        {{- if $root.Values.online.enabled }}
        - name: BATCHWEAVE_ONLINE_HOST
          valueFrom: {fieldRef: {fieldPath: status.podIP}}
        - {name: BATCHWEAVE_ONLINE_PORT, value: {{ $root.Values.online.port | quote }}}
        {{- end }}
        - {name: BATCHWEAVE_METRICS_HOST, value: "0.0.0.0"}
        - {name: BATCHWEAVE_METRICS_PORT, value: {{ $root.Values.metrics.port | quote }}}
        {{- include "batchweave.settings" $root.Values.settings | nindent 8 }}
        {{- include "batchweave.settings" $model.settings | nindent 8 }}
      ports:
        - {name: metrics, containerPort: {{ $root.Values.metrics.port }}}
        {{- if $root.Values.online.enabled }}
        - {name: online, containerPort: {{ $root.Values.online.port }}}
        {{- end }}
      securityContext:
        {{- include "batchweave.containerSecurity" $root | nindent 8 }}
      {{- $resources := $model.resources | default dict }}
      {{- $gpus := $model.gpusPerNode | default 0 | int }}
      {{- if $gpus }}
      {{- $gpu := dict ($model.gpuResource | default "nvidia.com/gpu") $gpus }}
      {{- $resources = mergeOverwrite (deepCopy $resources) (dict "limits" (mergeOverwrite (deepCopy ($resources.limits | default dict)) $gpu)) }}
      {{- end }}
      resources: {{ toJson $resources }}
      volumeMounts:
        - {name: shared-memory, mountPath: /dev/shm}
        - {name: models, mountPath: /home/batchweave/.cache/huggingface}
  volumes:
    - name: shared-memory
      emptyDir: {medium: Memory, sizeLimit: {{ $model.sharedMemory | default "16Gi" }}}
    - name: models
      emptyDir: {}
{{- end }}
