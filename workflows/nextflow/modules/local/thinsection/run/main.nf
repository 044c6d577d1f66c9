process THINSECTION_RUN {
    tag "${meta.id}"
    label 'process_medium'

    conda "${moduleDir}/environment.yml"
    container "${params.thinsection_container}"

    input:
    // meta: [id: slide id, patient_id: ..., label: ...]; slide: its file, or the files of a folder slide
    tuple val(meta), path(slide, stageAs: 'slide/*')

    output:
    tuple val(meta), path("parts/${prefix}")  , emit: results
    tuple val(meta), path("${prefix}.run.json"), emit: summary
    path "versions.yml"                       , emit: versions

    when:
    task.ext.when == null || task.ext.when

    script:
    def args = task.ext.args ?: ''
    def first = slide instanceof List ? slide[0] : slide
    prefix = task.ext.prefix ?: "${meta.id}"
    """
    cat <<-'END_ROW' > ${prefix}.csv
    slide_id,slide_path,patient_id,label
    "${meta.id}","${first}","${meta.patient_id ?: ''}","${meta.label ?: ''}"
    END_ROW

    thinsection run ${prefix}.csv \\
        --out parts/${prefix} \\
        --threads ${task.cpus} \\
        ${args} \\
        --json > ${prefix}.run.json

    cat <<-END_VERSIONS > versions.yml
    "${task.process}":
        thinsection: \$(thinsection --version)
    END_VERSIONS
    """

    stub:
    prefix = task.ext.prefix ?: "${meta.id}"
    """
    mkdir -p parts/${prefix}/slides
    touch ${prefix}.run.json

    cat <<-END_VERSIONS > versions.yml
    "${task.process}":
        thinsection: \$(thinsection --version)
    END_VERSIONS
    """
}
