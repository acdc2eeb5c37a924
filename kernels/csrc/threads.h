/* Work shared out to threads that stay.
 *
 * Tasks lie in a row, and half of the threads take them from its front, half from its back, so that each finds the data of its next
 * task beside that of its last. A thread that finds no core takes nothing, and the others do its share: the end of a job waits
 * only for tasks that have begun. Which thread does a task must not change a result.
 */

#ifndef BATCHRUN_THREADS_H
#define BATCHRUN_THREADS_H

#include <stdint.h>

#define MAX_THREADS 512

/* Task `index` of a job; `next` is the one that this thread will probably do after it, or -1; `thread` is below the job's
 * threads, and no two threads of a job have the same. */
typedef void TaskFunction(const void *job, int64_t index, int64_t next, int thread);

/* Rows [first, end) of a job. */
typedef void RowsFunction(const void *job, int64_t first, int64_t end);

/* Does tasks [0, count), count < 2^31, and returns when all are done. The calling thread does whatever no other has taken, all of it
 * while another job is at work. */
void share_out(int threads, int64_t count, TaskFunction *task, const void *job);

/* The same with rows [0, count), `at_once` of them to a task: for rows that cost less than taking a task. */
void share_rows(int threads, int64_t count, int at_once, RowsFunction *work, const void *job);

#endif
