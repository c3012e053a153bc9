-- Puts groups into the backlog, all or none.
-- ARGV: request key, then per task: task id, priority, compressed task.
-- Reply: ok {groups, backlog}; busy {backlog, limit}. What always holds: one request key, one set of groups.
local job = read_job()
if not job then return reply('missing') end
local earlier = load(REQUESTS, 's:' .. ARGV[1])
if earlier then return reply('ok', { groups = earlier, backlog = call('ZCARD', BACKLOG) }) end
local tasks, backlog = (#ARGV - 1) / 3, call('ZCARD', BACKLOG)
if backlog + tasks > job.backlog_limit then return reply('busy', { backlog = backlog, limit = job.backlog_limit }) end

local now, job_id, ids = seconds(), call('HGET', JOB, 'job_id'), {}
local last = call('HINCRBY', JOB, 'groups', tasks)
for i = 1, tasks do
  local at, n = 3 * i - 1, last - tasks + i
  local gid = job_id .. '-g' .. whole(n)
  local g = {
    n = n, task_id = ARGV[at], priority = tonumber(ARGV[at + 1]), state = 'queued', size = job.members,
    members = job.members, requested_size = job.group_size, requeues = 0, ended = 0, sampled_tokens = 0, created_at = now, queued_at = now,
  }
  save(GROUPS, gid, g)
  call('HSET', TASKS, gid, ARGV[at + 2])
  call('ZADD', BACKLOG, backlog_place(g), gid)
  call('ZADD', ORDER, n, gid)
  ids[i] = gid
end
save(REQUESTS, 's:' .. ARGV[1], ids)
call('ZADD', ENDED, now, 'q:s:' .. ARGV[1])
return reply('ok', { groups = ids, backlog = backlog + tasks })
