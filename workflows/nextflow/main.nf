// One process for each slide, then one merged results folder:
//     nextflow run main.nf --input cohort.csv --outdir results

include { THINSECTION_RUN   } from './modules/local/thinsection/run/main'
include { THINSECTION_MERGE } from './modules/local/thinsection/merge/main'

workflow {
    // columns: slide_path, and where known slide_id, patient_id, label
    slides = Channel
        .fromPath(params.input, checkIfExists: true)
        .splitCsv(header: true)
        .map { row ->
            def slide = file(row.slide_path, checkIfExists: true)
            def meta = [
                id: row.slide_id ?: slide.baseName,
                patient_id: row.patient_id ?: '',
                label: row.label ?: '',
            ]
            // a MIRAX slide is a file and a folder of the same name
            def files = slide.extension == 'mrxs' ? [slide, slide.resolveSibling(slide.baseName)] : slide
            [meta, files]
        }
    THINSECTION_RUN(slides)
    THINSECTION_MERGE(THINSECTION_RUN.out.results.map { _meta, folder -> folder }.collect())
}
